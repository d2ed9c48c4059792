//! Every refusal that a client can get, as it arrives: status, envelope, headers.

use serde_json::Value;

use crate::support::TestResponse;

mod body;
mod end;
mod engine;
mod head;
mod memory;

/// Asserts what holds for every refusal and for this one. Returns the envelope's `error`.
pub(crate) fn refusal(answer: &TestResponse, status: u16, code: &str) -> Value {
    let error = answer.json()["error"].clone();
    let told = format!("{} {:?} {}", answer.status, answer.headers, answer.text());
    assert_eq!((answer.status, error["code"].as_str()), (status, Some(code)), "{told}");
    assert!(answer.complete && !answer.header("content-length").is_empty(), "{told}");
    assert_eq!(answer.header("content-type"), "application/json", "{told}");
    assert!(!answer.header("x-request-id").is_empty(), "{told}");
    assert_eq!(error["type"], kind(status, code), "{told}");
    assert!(!error["message"].as_str().unwrap().is_empty(), "{told}");
    assert!(error.as_object().unwrap().contains_key("param"), "{told}");
    // A GET changes nothing, so a retry would not help.
    let looks = error["details"]["waited_for"] == "nothing: a GET does not wake a model";
    // A client must not retry a failure that only a person can fix.
    let permanent =
        ["command_not_found", "permission_denied", "wrong_model", "public_listener", "unrunnable"];
    let cause = error["details"]["cause"].as_str().unwrap_or_default();
    let retry = match (status, code) {
        (429, _) => true,
        (503, "model_not_ready") => !looks && !permanent.contains(&cause),
        // Without a wait the engine failed under a running exchange, and a second copy would not help.
        (503, "engine_failed") => error["details"]["waited_for"] != "nothing",
        // The engine may have begun a request that it had for a while.
        (502, "engine_closed") => {
            !error["message"].as_str().unwrap().contains("may have started processing the request")
        }
        (502 | 503, _) => true,
        _ => false,
    };
    assert_eq!(answer.header("x-should-retry"), retry.to_string(), "{told}");
    match status {
        422 | 429 | 503 => {
            let details = &error["details"];
            assert!(!details["waited_for"].as_str().unwrap().is_empty(), "{told}");
            assert!(details["waited"].is_string() && details["queue_position"].is_u64(), "{told}");
            assert!(details["holders"].is_array(), "{told}");
            if status == 422 || looks {
                assert_eq!(answer.header("retry-after"), "", "{told}");
            } else {
                assert!(answer.header("retry-after").parse::<u64>().unwrap() >= 1, "{told}");
            }
        }
        _ => assert_eq!((answer.header("retry-after"), error.get("details")), ("", None), "{told}"),
    }
    error
}

fn kind(status: u16, code: &str) -> &'static str {
    match (status, code) {
        (429, "insufficient_memory") => "insufficient_memory",
        (429, _) => "rate_limit_error",
        (401, _) => "authentication_error",
        (403, _) => "permission_error",
        (500.., _) => "server_error",
        _ => "invalid_request_error",
    }
}
