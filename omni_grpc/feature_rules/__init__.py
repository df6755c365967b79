"""What each feature declares about its settings, without torch: when it is on, what it refuses, how it is applied.

One file per feature, with one `FeatureRules` in it; `table.py` lists them all. The implementation, which imports torch,
is `omni_grpc/features/<name>.py`.
"""
