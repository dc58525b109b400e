"""The norm of any gradient: any layout, packed into few reads, on the CPU or an accelerator.

`read_plan` packs, `batched_norms` reads on the host (`row_sums_by_blas`, `row_sums_by_torch`), `foreach_norms`
elsewhere, with an `async_copy` into `pinned_buffers`; `gradient_writes` notices what is written to one since.
"""
