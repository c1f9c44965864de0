"""Pages of ``megasdc report``: a run, runs compared, a study, a sweep, DropCompute; from files to figures and HTML."""
