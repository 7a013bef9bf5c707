# SPDX-License-Identifier: Apache-2.0
"""Records, or anybody's images, in MongoDB collections."""
