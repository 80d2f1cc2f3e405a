"""What a run tells the outside about itself: events, metrics, health and status."""
