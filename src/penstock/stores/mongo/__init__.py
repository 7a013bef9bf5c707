# SPDX-License-Identifier: Apache-2.0
"""Records, or images of other making, in MongoDB collections."""
