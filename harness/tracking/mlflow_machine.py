"""Load and memory of the machine that trains, as metrics `system/...` of the run."""

from __future__ import annotations

from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor


class MachineWatch:
    """Sends load and memory of this machine and its GPUs, by MLflow's own collector.

    seconds: time between two samples.

    Raises ImportError without psutil (for GPUs: nvidia-ml-py), and what mlflow raises.
    """

    def __init__(self, uri: str, run_id: str, seconds: float) -> None:
        self._monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
        # Seconds, though its annotation says int. The environment's value wins, as everywhere in MLflow.
        if not MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get():
            self._monitor.sampling_interval = seconds
        self._monitor.start()

    @property
    def alive(self) -> bool:
        """Whether it still sends. It gives up for good when it cannot reach the server."""
        thread = self._monitor._process
        return thread is not None and thread.is_alive()

    def finish(self) -> None:
        """End it; delivers what was measured."""
        self._monitor.finish()
