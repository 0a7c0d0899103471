"""`make dashboards-check`: every panel and every alert on the real system, under load, with a real Prometheus."""
