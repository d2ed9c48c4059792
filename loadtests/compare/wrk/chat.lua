-- One chat request for wrk, the same on every connection. `compare wrk` passes key and body, and reads the last line.
-- There is no `request` and no `response` here: with either, wrk would run Lua for each request, on the load's core.
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer " .. os.getenv("ROUSE_WRK_KEY")
wrk.body = os.getenv("ROUSE_WRK_BODY")

function done(summary)
   local errors = summary.errors
   local counts = string.format(
      '"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d',
      errors.connect, errors.read, errors.write, errors.status, errors.timeout)
   io.write(string.format(
      'summary: {"requests":%d,"bytes":%d,"duration_us":%d,"errors":{%s}}\n',
      summary.requests, summary.bytes, summary.duration, counts))
end
