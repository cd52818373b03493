"""What a measurement of a machine gives, made up."""

from typing import Any

MEASURED: dict[str, Any] = {
    "matmul": {"float32": [{"smallest_dim": m, "flops_per_s": f} for m, f in ((1, 3e10), (16, 9e10), (64, 8e10))]},
    "copy_bandwidth_bytes_per_s": 4e10,
    "launch_s": 2e-6,
    "link": {"latency_s": 5e-5, "bandwidth_bytes_per_s": 1.5e9},
}
