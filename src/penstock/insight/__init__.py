# SPDX-License-Identifier: Apache-2.0
"""Pipeline monitoring: per-batch timing, bottleneck diagnosis, worker autotuning."""
