# SPDX-License-Identifier: Apache-2.0
"""Datasets of images, with classes, boxes or landmarks."""
