"""Load and memory of the machine that trains, as metrics `system/...` of the run."""

from __future__ import annotations

from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor


class MachineWatch:
    """Load and memory of this machine and its GPUs into the run, by MLflow's own collector: `system/...`.

    Raises ImportError without psutil (GPUs: nvidia-ml-py), and what mlflow raises.
    """

    def __init__(self, uri: str, run_id: str, seconds: float) -> None:
        self._monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
        # A number of seconds, whatever its annotation says; the environment's wins, as everywhere in MLflow.
        if not MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get():
            self._monitor.sampling_interval = seconds
        self._monitor.start()

    @property
    def alive(self) -> bool:
        """Whether it goes on; it gives up for good when it cannot reach the server."""
        thread = self._monitor._process
        return thread is not None and thread.is_alive()

    def finish(self) -> None:
        """End it; what was measured is delivered."""
        self._monitor.finish()
