# SPDX-License-Identifier: Apache-2.0
"""`cupyinfer replay`: a request trace through continuous batching with chunked prefill, measured and checked."""
