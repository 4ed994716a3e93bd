package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/unit"
)

// service is the [Service] section of a unit: each directive with its values.
type service map[string][]string

func units(t *testing.T) map[string]service {
	t.Helper()
	all := map[string]service{}
	for _, name := range []string{"posthaste-api", "posthaste-migrate", "posthaste-relay"} {
		options, err := unit.DeserializeOptions(strings.NewReader(file(t, "systemd/"+name+".service")))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		s := service{}
		for _, o := range options {
			if o.Section == "Service" {
				s[o.Name] = append(s[o.Name], o.Value)
			}
		}
		all[name] = s
	}
	return all
}

// sandbox is what every unit gives up.
var sandbox = map[string]string{
	"DynamicUser": "yes", "CapabilityBoundingSet": "", "NoNewPrivileges": "yes", "ProtectSystem": "strict",
	"ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes", "PrivateUsers": "yes", "ProtectClock": "yes",
	"ProtectControlGroups": "yes", "ProtectHostname": "yes", "ProtectKernelLogs": "yes", "ProtectKernelModules": "yes",
	"ProtectKernelTunables": "yes", "ProtectProc": "invisible", "RestrictNamespaces": "yes", "RestrictRealtime": "yes",
	"RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX", "RestrictSUIDSGID": "yes", "RemoveIPC": "yes",
	"LockPersonality": "yes", "MemoryDenyWriteExecute": "yes", "SystemCallArchitectures": "native",
	"SystemCallFilter": "@system-service|~@privileged @resources", "SystemCallErrorNumber": "EPERM", "UMask": "0077",
}

func TestUnits(t *testing.T) {
	t.Parallel()
	page := file(t, "../docs/deploying.md")
	drain, err := time.ParseDuration(settings(t)["POSTHASTE_DRAIN_TIMEOUT"])
	must(t, err)
	for name, want := range map[string]service{
		"posthaste-api":     {"Type": {"notify"}, "ExecStart": {"serve"}, "EnvironmentFile": {"api"}},
		"posthaste-relay":   {"Type": {"notify"}, "ExecStart": {"relay"}, "EnvironmentFile": {"relay"}},
		"posthaste-migrate": {"Type": {"oneshot"}, "ExecStart": {"migrate"}, "EnvironmentFile": {"relay"}},
	} {
		s := units(t)[name]
		env := "/etc/posthaste/" + want["EnvironmentFile"][0] + ".env"
		if !slices.Equal(s["Type"], want["Type"]) || !slices.Equal(s["EnvironmentFile"], []string{"-" + env}) ||
			!slices.Equal(s["ExecStart"], []string{"posthaste " + want["ExecStart"][0]}) {
			t.Errorf("%s: %v %v %v", name, s["Type"], s["ExecStart"], s["EnvironmentFile"])
		}
		if !strings.Contains(page, env) || !strings.Contains(page, name) {
			t.Errorf("docs/deploying.md does not speak of %s and %s", name, env)
		}
		secret := "/etc/posthaste/" + want["EnvironmentFile"][0] + ".postgres-url"
		loaded := []string{"postgres-url:" + secret, "redis-url:/etc/posthaste/redis-url"}
		if !slices.Equal(s["LoadCredential"], loaded) ||
			!slices.Equal(s["Environment"], []string{"POSTHASTE_POSTGRES_URL_FILE=%d/postgres-url " +
				"POSTHASTE_REDIS_URL_FILE=%d/redis-url"}) || !strings.Contains(page, filepath.Base(secret)) {
			t.Errorf("%s: credentials %v, environment %v", name, s["LoadCredential"], s["Environment"])
		}
		for directive, value := range sandbox {
			if got := strings.Join(s[directive], "|"); len(s[directive]) == 0 || got != value {
				t.Errorf("%s: %s=%q, want %q", name, directive, got, value)
			}
		}
		if name == "posthaste-migrate" {
			continue
		}
		stop, err := time.ParseDuration(strings.Join(s["TimeoutStopSec"], "") + "s")
		if err != nil || stop < drain+5*time.Second {
			t.Errorf("%s has %v for a stop that may take %v and a little, %v", name, stop, drain, err)
		}
		if !slices.Equal(s["TimeoutStartSec"], []string{"infinity"}) || len(s["WatchdogSec"]) != 1 {
			t.Errorf("%s: TimeoutStartSec=%v WatchdogSec=%v", name, s["TimeoutStartSec"], s["WatchdogSec"])
		}
		if !slices.Equal(s["Restart"], []string{"always"}) ||
			!slices.Equal(s["RestartPreventExitStatus"], []string{"2"}) {
			t.Errorf("%s: Restart=%v RestartPreventExitStatus=%v", name, s["Restart"], s["RestartPreventExitStatus"])
		}
	}
}

// TestUnitsBySystemd has systemd itself look at the units, where it is installed.
func TestUnitsBySystemd(t *testing.T) {
	t.Parallel()
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	dir := t.TempDir()
	var names []string
	for name := range units(t) {
		// It looks for the program, too.
		text := strings.ReplaceAll(file(t, "systemd/"+name+".service"), "ExecStart=posthaste", "ExecStart=/bin/true")
		name = filepath.Join(dir, name+".service")
		names = append(names, name)
		must(t, os.WriteFile(name, []byte(text), 0o600))
	}
	if out, err := exec.CommandContext(t.Context(), analyze, append([]string{"verify"}, names...)...).
		CombinedOutput(); err != nil || strings.Contains(string(out), dir) {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	args := append([]string{"security", "--offline=true", "--threshold=15"}, names...) // 1.5 of 10: "OK" ends at 5.0
	if out, err := exec.CommandContext(t.Context(), analyze, args...).CombinedOutput(); err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}
}
