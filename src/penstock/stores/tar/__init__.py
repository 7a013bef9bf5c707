# SPDX-License-Identifier: Apache-2.0
"""tar files in WebDataset's layout."""
