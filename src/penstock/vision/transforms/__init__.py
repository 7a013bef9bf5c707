# SPDX-License-Identifier: Apache-2.0
"""Transforms of samples, and datasets that make a sample of several."""
