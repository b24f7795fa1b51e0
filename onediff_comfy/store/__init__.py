"""The graph cache's disk: compiled graphs as signed files, found again by any later process."""
