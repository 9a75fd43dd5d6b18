"""Studies and measurements that publish their figures in results/; run from a source tree."""
