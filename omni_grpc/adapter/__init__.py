"""Any diffusers pipeline as a runner: its own `__call__`, stopped at each step of its scheduler."""
