# SPDX-License-Identifier: Apache-2.0
"""The classes of a dataset's samples: as given, as the dataset knows them, as a sample says.

`known` is where to begin; `penstock.labels_of` is what users call.
"""
