# SPDX-License-Identifier: Apache-2.0
"""What the config names: importing this registers it (`custom_imports` in the config does)."""

from plugin import collate, dataset, metric, model, picture, transforms

__all__ = ["collate", "dataset", "metric", "model", "picture", "transforms"]
