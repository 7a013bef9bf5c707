# SPDX-License-Identifier: Apache-2.0
"""`penstock run`: an unedited program on Penstock's loader, and a summary of it at exit.

penstock run ──exec──▶ python train.py          unchanged, except for two environment variables:
                         │                      PYTHONPATH and PENSTOCK_RUN
          startup/sitecustomize.py              imported when it and each of its children start
                         │ once torch is imported
                  book.begin()                  replaces the loader, creates the Book
                         │
                       Book                     measures each loader, prints the summary at exit
"""
