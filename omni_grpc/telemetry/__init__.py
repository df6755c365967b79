"""What operators see of a server: metrics, traces and logs. It looks at a gate and its fleet, which do not know it."""
