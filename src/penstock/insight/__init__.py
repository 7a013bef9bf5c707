# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom: accounts of every batch, a verdict, and a crew of workers that fits."""
