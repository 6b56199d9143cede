"""The dashboard: described once (`panels`), written as Grafana's JSON (`grafana`), drawn as a picture (`picture`)."""
