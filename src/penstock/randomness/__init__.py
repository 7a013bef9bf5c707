# SPDX-License-Identifier: Apache-2.0
"""Randomness that depends on (seed, epoch, position) and nothing else."""
