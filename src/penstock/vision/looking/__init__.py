# SPDX-License-Identifier: Apache-2.0
"""Samples drawn, to be looked at."""
