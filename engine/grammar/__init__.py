"""Structured output: what a request asks for, compiled by llguidance to a constraint of the sampler."""
