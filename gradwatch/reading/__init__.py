"""The norm of any gradient: any layout, packed into few reads, on the CPU or an accelerator."""
