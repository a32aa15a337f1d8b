"""Bytes and streams: gRPC channels and servers, lasting streams, the messages. Decides nothing."""
