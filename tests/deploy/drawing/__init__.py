"""Pictures of every panel, drawn with Grafana's own components from what a real Prometheus scraped of real jobs.

`python -m tests.deploy.drawing FOLDER` needs prometheus, prometheus-alertmanager, nodejs, npm and chromium, and
the npm registry for `package.json`. It is a tool to look with, not a test; test_dashboards.py checks the answers.
"""
