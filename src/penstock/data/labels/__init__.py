# SPDX-License-Identifier: Apache-2.0
"""The classes of a dataset's samples: `known` is where to begin."""
