"""Foreword under observation on this machine: server, Prometheus, Grafana where it is installed, work to see."""
