# SPDX-License-Identifier: Apache-2.0
"""`loader.stats()` for TensorBoard, Prometheus and OpenTelemetry, each by its own library.

Nothing here is imported by any other part; import the module of the tool that you use.
"""
