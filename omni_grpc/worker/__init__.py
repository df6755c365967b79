"""The worker: loads a pipeline and carries out plans. It knows no grpc and no jobs, only requests and their states."""
