"""How a call finds its backend: operators, argument checks, devices, registration with torch."""
