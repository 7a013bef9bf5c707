# SPDX-License-Identifier: Apache-2.0
"""Drawing of samples: boxes, classes and landmarks, contact sheets."""
