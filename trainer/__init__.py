"""The RL trainer that ships beside precgraph. Not built yet: only its command exists, and says so."""
