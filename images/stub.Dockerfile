# The stub, also under the name `/proxy`, by which Pods written for other stubs start it. `images/build` makes the context,
# as for the gateway.
FROM scratch
COPY rootfs/ /
# What reads the accelerators' memory needs the management library and nothing else of the driver.
ENV NVIDIA_DRIVER_CAPABILITIES=utility
USER 65532:65532
EXPOSE 8000 8001 8002 8080 8081 8082
ENTRYPOINT ["/rouse-stub"]
