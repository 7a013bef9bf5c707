# SPDX-License-Identifier: Apache-2.0
"""Objects by name, in a folder, a bucket or on a web server: what stores of shards lie on."""
