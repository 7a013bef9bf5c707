# SPDX-License-Identifier: Apache-2.0
"""Samples with objects, as one batch."""
