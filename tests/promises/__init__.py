"""What gradwatch promises to a training job, shown on whole scripts."""
