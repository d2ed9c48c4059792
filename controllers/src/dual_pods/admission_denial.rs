//! Explains denials by admission policies that block gateway writes on Pods.
//!
//! The public project's installation has such policies, and they exempt its own controllers by their account names.
//! Under another account name a gateway can bind no Pod and write no status.

/// Suffix of the account names that the public project's policies exempt.
const EXEMPT: &str = "-fma-controllers";

/// Returns advice for the administrator if a policy denied the write, else `None`.
#[must_use]
pub fn advice(refusal: &str) -> Option<String> {
    let (_, rest) = refusal.split_once("ValidatingAdmissionPolicy '")?;
    let (policy, rest) = rest.split_once('\'')?;
    if !rest.contains("denied request") {
        return None;
    }
    let what = if policy.starts_with("fma-") {
        format!("run the gateways under an account whose name ends in {EXEMPT} (see docs/dual-pods.md)")
    } else {
        "exempt the gateways' account from the policy".to_owned()
    };
    Some(format!(
        "the admission policy {policy} prevents Rouse from serving dual pods: {what}. The API server returned: \
         {refusal}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_says_what_to_do_and_another_refusal_is_none() {
        let denied = |policy: &str| {
            format!(
                "pods \"chat-1\" is forbidden: ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied \
                 request: not yours"
            )
        };
        let public = advice(&denied("fma-immutable-fields")).unwrap();
        assert!(public.contains("an account whose name ends in -fma-controllers"), "{public}");
        assert!(public.ends_with("not yours"), "{public}");
        let own = advice(&denied("no-edits")).unwrap();
        assert!(own.contains("exempt the gateways' account"), "{own}");
        assert_eq!(advice("Pod \"x\" is invalid: spec: Forbidden"), None);
    }
}
