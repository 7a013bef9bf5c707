# SPDX-License-Identifier: Apache-2.0
"""What works with Ray. Importing this imports no Ray; calling it does."""

from __future__ import annotations

from penstock.ray.data import from_ray_data, to_ray_data

__all__ = ["from_ray_data", "to_ray_data"]
