"""Many requests on one runtime: a scheduler, and a server in the shape of OpenAI's."""
