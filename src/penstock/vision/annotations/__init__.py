# SPDX-License-Identifier: Apache-2.0
"""Annotation files of many formats, read to one form and written from it."""
