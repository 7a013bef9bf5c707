# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to an accelerator: page-locked slots, copies beside the consumer's work."""
