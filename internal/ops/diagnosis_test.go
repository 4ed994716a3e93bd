package ops_test

import (
	"testing"

	"posthaste/internal/ops"
)

func TestVerdictOfADiagnosis(t *testing.T) {
	t.Parallel()
	ok := ops.Finding{Check: "postgres", Severity: ops.SeverityOK}
	warn := ops.Finding{Check: "history", Severity: ops.SeverityWarn}
	schema := ops.Finding{Check: "schema", Severity: ops.SeverityFail}
	redis := ops.Finding{Check: "redis", Severity: ops.SeverityFail}
	for want, findings := range map[string][]ops.Finding{
		"all is well": {ok, ok},
		"no problems, 1 warning: the relay can run":                                       {ok, warn},
		"no problems, 2 warnings: the relay can run":                                      {warn, warn},
		"1 problem, 0 warnings: the relay cannot run safely before this is fixed: schema": {ok, schema},
		"2 problems, 1 warning: the relay cannot run safely before this is fixed: schema, redis": {
			ok, schema, warn, redis,
		},
	} {
		if got := (ops.Diagnosis{Findings: findings}).Verdict(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
