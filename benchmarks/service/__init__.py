"""What the service costs and how fast it answers, measured on real servers over loopback.

    python -m benchmarks.service            every benchmark, one after the other
    python -m benchmarks.service cancel     one of them

Servers run in processes of their own with the checkpoint of tools/tiny/kept.py, so the figures are those of the engine
and the server around a model, not of a model. They read /proc, so they need Linux.
"""
