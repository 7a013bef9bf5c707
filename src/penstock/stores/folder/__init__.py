# SPDX-License-Identifier: Apache-2.0
"""Image files in folders."""
