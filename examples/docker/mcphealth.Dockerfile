# The command alone: mcphealth serve for other containers, or /mcphealth to copy into
# a server's image (server.Dockerfile). ./build makes it.
FROM scratch
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY mcphealth /mcphealth
USER 65532:65532
EXPOSE 9105
# Any HTTP answer of serve itself will do: /livez is no MCP endpoint.
HEALTHCHECK --interval=10s --timeout=6s CMD ["/mcphealth", "probe", "--healthcheck", "--alive-if", "any_response", "--deep", "off", "http://127.0.0.1:9105/livez"]
ENTRYPOINT ["/mcphealth"]
CMD ["serve", "--config", "/etc/mcphealth.yml"]
