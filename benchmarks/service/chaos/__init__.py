"""Faults on purpose: what a server, its clients and its store do while things around them break, and after.

    python -m benchmarks.service.chaos                                  every fault, a few rounds each
    python -m benchmarks.service.chaos --only disk_full --rounds 100

Each fault has a server of its own under the load of clients that come back. `checker.py` says what must hold after each
round.
"""
