# SPDX-License-Identifier: Apache-2.0
"""How batches cross from a worker to the main process: slots, leases, packing, channels."""
