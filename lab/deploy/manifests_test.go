package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// manifests are what a folder renders to, each by its name.
type manifests struct {
	deployments map[string]apps.Deployment
	jobs        map[string]batch.Job
	services    map[string]core.Service
	configs     map[string]core.ConfigMap
	namespaces  map[string]core.Namespace
	budgets     map[string]policy.PodDisruptionBudget
	policies    map[string]networking.NetworkPolicy
	monitors    map[string]monitoring.ServiceMonitor
	rules       map[string]monitoring.PrometheusRule
}

// render renders a folder as kustomize does, and reads everything strictly: an object of another kind, or with a field
// that Kubernetes does not know, fails the test.
func render(t *testing.T, dir string) manifests {
	t.Helper()
	all, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	must(t, err)
	var m manifests
	into := map[string]func(string) error{
		"apps/v1 Deployment":                      decode(&m.deployments),
		"batch/v1 Job":                            decode(&m.jobs),
		"v1 Service":                              decode(&m.services),
		"v1 ConfigMap":                            decode(&m.configs),
		"v1 Namespace":                            decode(&m.namespaces),
		"policy/v1 PodDisruptionBudget":           decode(&m.budgets),
		"networking.k8s.io/v1 NetworkPolicy":      decode(&m.policies),
		"monitoring.coreos.com/v1 ServiceMonitor": decode(&m.monitors),
		"monitoring.coreos.com/v1 PrometheusRule": decode(&m.rules),
	}
	for _, r := range all.Resources() {
		kind := r.GetApiVersion() + " " + r.GetKind()
		add, ok := into[kind]
		if !ok {
			t.Fatalf("%s has an object of kind %s", dir, kind)
		}
		if err := add(r.MustYaml()); err != nil {
			t.Errorf("%s: %s %s: %v", dir, kind, r.GetName(), err)
		}
	}
	return m
}

// decode returns what reads an object and adds it to a map, under its name.
func decode[T any](into *map[string]T) func(string) error {
	*into = map[string]T{}
	return func(text string) error {
		var object T
		var header struct {
			meta.ObjectMeta `json:"metadata"`
		}
		if err := yaml.Unmarshal([]byte(text), &header); err != nil {
			return err
		}
		(*into)[header.Name] = object
		if err := strictly([]byte(text), &object); err != nil {
			return err
		}
		(*into)[header.Name] = object
		return nil
	}
}

// pods are the templates of all pods, by the name of what makes them.
func (m manifests) pods() map[string]core.PodTemplateSpec {
	all := map[string]core.PodTemplateSpec{}
	for name, d := range m.deployments {
		all[name] = d.Spec.Template
	}
	for name, j := range m.jobs {
		all[name] = j.Spec.Template
	}
	return all
}

// selected are the names of what makes the pods that a selector matches.
func (m manifests) selected(t *testing.T, s *meta.LabelSelector) []string {
	t.Helper()
	selector, err := meta.LabelSelectorAsSelector(s)
	must(t, err)
	var names []string
	for name, p := range m.pods() {
		if selector.Matches(labels.Set(p.Labels)) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// container is the only one of a pod that lasts.
func container(t *testing.T, p core.PodTemplateSpec) core.Container {
	t.Helper()
	if len(p.Spec.Containers) != 1 {
		t.Fatalf("want one container, got %d", len(p.Spec.Containers))
	}
	return p.Spec.Containers[0]
}

// containers are all of a pod, in the order of their starts.
func containers(p core.PodTemplateSpec) []core.Container {
	return slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
}

const base, example = "kubernetes/base", "kubernetes/example"

func TestManifestsAreAllThere(t *testing.T) {
	t.Parallel()
	m := render(t, example)
	for name, replicas := range map[string]int32{"posthaste-relay": 2, "posthaste-api": 2} {
		d, ok := m.deployments[name]
		if !ok || d.Spec.Replicas == nil || *d.Spec.Replicas != replicas {
			t.Errorf("%s: want %d replicas, got %v", name, replicas, d.Spec.Replicas)
		}
		if d.Spec.Strategy.Type == apps.RecreateDeploymentStrategyType {
			t.Errorf("%s is replaced all at once", name)
		}
		if most := m.budgets[name].Spec.MaxUnavailable; most == nil || *most != intstr.FromInt32(1) {
			t.Errorf("%s: more than one may be evicted at once: %v", name, most)
		}
	}
	if len(m.monitors) != 1 || len(m.rules) != 2 || len(m.namespaces) != 1 || len(m.configs) != 1 {
		t.Errorf("monitors %d, rules %d, namespaces %d, configs %d; want two rules, and one of the others",
			len(m.monitors), len(m.rules), len(m.namespaces), len(m.configs))
	}
	for name, p := range m.pods() {
		for _, c := range containers(p) {
			if c.Image != "registry.example.com/posthaste:v0.1.0" {
				t.Errorf("%s: the overlay's image is not used: %s", name, c.Image)
			}
		}
	}
}

// TestManifestsOfAnOutboxAlone: the base is the relay, which migrates the outbox. It needs neither the API, nor a hook
// of a tool, nor the Prometheus operator. The API's pods migrate before they start.
func TestManifestsOfAnOutboxAlone(t *testing.T) {
	t.Parallel()
	b := render(t, base)
	relay, ok := b.deployments["posthaste-relay"]
	if !ok || len(b.pods()) != 1 || len(b.services) != 1 || len(b.budgets) != 1 || len(b.policies) != 2 {
		t.Fatalf("the base has %d pods, %d services, %d budgets, %d policies", len(b.pods()), len(b.services),
			len(b.budgets), len(b.policies))
	}
	if args := container(t, relay.Spec.Template).Args; !slices.Equal(args, []string{"relay", "--migrate"}) {
		t.Errorf("the relay does not migrate: %v", args)
	}
	if n := len(b.monitors) + len(b.rules); n != 0 {
		t.Errorf("the base needs the Prometheus operator, for %d objects", n)
	}
	m := render(t, example)
	first := m.deployments["posthaste-api"].Spec.Template.Spec.InitContainers
	if len(first) != 1 || !slices.Equal(first[0].Args, []string{"migrate"}) {
		t.Errorf("the API does not migrate: %+v", first)
	}
	for name, d := range m.deployments {
		for key := range d.Annotations {
			t.Errorf("%s has the annotation %s", name, key)
		}
	}
	if len(m.jobs) != 0 {
		t.Errorf("a job cannot be changed: %v", m.jobs)
	}
}

// TestManifestsSelect: every selector matches the pods that it means, and no other.
func TestManifestsSelect(t *testing.T) {
	t.Parallel()
	m := render(t, example)
	want := func(what string, got []string, names ...string) {
		if !slices.Equal(got, names) {
			t.Errorf("%s selects the pods of %v, want %v", what, got, names)
		}
	}
	for name, d := range m.deployments {
		want("deployment "+name, m.selected(t, d.Spec.Selector), name)
		apart := d.Spec.Template.Spec.Affinity.PodAntiAffinity
		for _, term := range apart.PreferredDuringSchedulingIgnoredDuringExecution {
			want("affinity of "+name, m.selected(t, term.PodAffinityTerm.LabelSelector), name)
		}
	}
	for name, s := range m.services {
		want("service "+name, m.selected(t, &meta.LabelSelector{MatchLabels: s.Spec.Selector}), name)
	}
	for name, b := range m.budgets {
		want("budget "+name, m.selected(t, b.Spec.Selector), name)
	}
	all := []string{"posthaste-api", "posthaste-relay"}
	for name, pods := range map[string][]string{
		"posthaste-deny": all, "posthaste-servers": all, "posthaste-scrapes": all, "posthaste-clients": all[:1],
	} {
		p := m.policies[name]
		want("policy "+name, m.selected(t, &p.Spec.PodSelector), pods...)
	}
	if len(m.policies) != 4 {
		t.Errorf("%d policies, want 4", len(m.policies))
	}
	for _, mon := range m.monitors {
		selector, err := meta.LabelSelectorAsSelector(&mon.Spec.Selector)
		must(t, err)
		for name, s := range m.services {
			if !selector.Matches(labels.Set(s.Labels)) {
				t.Errorf("service %s is not scraped", name)
			}
		}
	}
}

// TestManifestsPolicies: everything is refused, but what is listed here.
func TestManifestsPolicies(t *testing.T) {
	t.Parallel()
	m := render(t, example)
	deny := m.policies["posthaste-deny"].Spec
	if len(deny.PolicyTypes) != 2 || len(deny.Ingress)+len(deny.Egress) != 0 {
		t.Errorf("not everything is denied: %+v", deny)
	}
	got := map[string][]string{}
	for name, p := range m.policies {
		for _, in := range p.Spec.Ingress {
			got[name] = append(got[name], rule("from", len(in.From), in.Ports))
		}
		for _, out := range p.Spec.Egress {
			got[name] = append(got[name], rule("to", len(out.To), out.Ports))
		}
	}
	for name, want := range map[string][]string{
		"posthaste-clients": {"from anybody TCP/http"},
		"posthaste-scrapes": {"from 1 TCP/admin"},
		"posthaste-servers": {"to 1 UDP/53 TCP/53", "to 1 TCP/5432 TCP/6379"},
	} {
		if !slices.Equal(got[name], want) {
			t.Errorf("%s: got %q, want %q", name, got[name], want)
		}
	}
}

func rule(way string, peers int, ports []networking.NetworkPolicyPort) string {
	text := fmt.Sprintf("%s %d", way, peers)
	if peers == 0 {
		text = way + " anybody"
	}
	for _, p := range ports {
		text += fmt.Sprintf(" %s/%s", *p.Protocol, p.Port)
	}
	return text
}

// TestManifestsAreRestricted holds every pod against the restricted profile of the Pod Security Standards, and more.
func TestManifestsAreRestricted(t *testing.T) {
	t.Parallel()
	m := render(t, example)
	if got := m.namespaces["posthaste"].Labels["pod-security.kubernetes.io/enforce"]; got != "restricted" {
		t.Errorf("the namespace enforces %q", got)
	}
	is := func(b *bool, want bool) bool { return b != nil && *b == want }
	for name, p := range m.pods() {
		pod := p.Spec
		if pod.HostNetwork || pod.HostPID || pod.HostIPC || len(pod.Volumes) > 0 {
			t.Errorf("%s shares what is the node's", name)
		}
		if s := pod.SecurityContext; s == nil || !is(s.RunAsNonRoot, true) || s.RunAsUser == nil ||
			*s.RunAsUser != 65532 || s.SeccompProfile == nil ||
			s.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault {
			t.Errorf("%s: security context of the pod %+v", name, s)
		}
		if !is(pod.AutomountServiceAccountToken, false) || !is(pod.EnableServiceLinks, false) {
			t.Errorf("%s gets a token of the cluster, or variables of other services", name)
		}
		for _, c := range containers(p) {
			if s := c.SecurityContext; s == nil || !is(s.AllowPrivilegeEscalation, false) ||
				!is(s.ReadOnlyRootFilesystem, true) || s.Privileged != nil || s.Capabilities == nil ||
				len(s.Capabilities.Add) > 0 ||
				!slices.Equal(s.Capabilities.Drop, []core.Capability{"ALL"}) {
				t.Errorf("%s: security context of the container %s: %+v", name, c.Name, s)
			}
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() ||
				c.Resources.Limits.Memory().Cmp(*c.Resources.Requests.Memory()) < 0 {
				t.Errorf("%s: resources of %s: %+v", name, c.Name, c.Resources)
			}
		}
	}
}

// TestManifestsPorts: listeners, container ports, services, scrapes and probes agree, and probes ask what is there.
func TestManifestsPorts(t *testing.T) {
	t.Parallel()
	m := render(t, example)
	for name, variables := range map[string]map[string]string{
		"posthaste-api":   {"http": "POSTHASTE_HTTP_ADDR", "admin": "POSTHASTE_ADMIN_ADDR"},
		"posthaste-relay": {"admin": "POSTHASTE_ADMIN_ADDR"},
	} {
		c := container(t, m.deployments[name].Spec.Template)
		ports := map[string]int32{}
		for _, p := range c.Ports {
			ports[p.Name] = p.ContainerPort
			if want := fmt.Sprintf(":%d", p.ContainerPort); environment(c)[variables[p.Name]] != want {
				t.Errorf("%s: port %s is %d, and the listener is %q", name, p.Name, p.ContainerPort,
					environment(c)[variables[p.Name]])
			}
		}
		for _, p := range m.services[name].Spec.Ports {
			if _, ok := ports[p.TargetPort.StrVal]; !ok {
				t.Errorf("service %s leads to port %s, which the container has not", name, p.TargetPort.String())
			}
		}
		scraped := func(p core.ServicePort) bool { return p.Name == m.monitors["posthaste"].Spec.Endpoints[0].Port }
		if len(ports) != len(variables) || !slices.ContainsFunc(m.services[name].Spec.Ports, scraped) {
			t.Errorf("%s: ports %v, and the service has none to be scraped", name, ports)
		}
		for path, probe := range map[string]*core.Probe{"/healthz": c.LivenessProbe, "/readyz": c.ReadinessProbe} {
			if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != path ||
				probe.HTTPGet.Port.StrVal != "admin" {
				t.Errorf("%s: want a probe of %s on the admin port, got %+v", name, path, probe)
			}
		}
	}
}

func environment(c core.Container) map[string]string {
	all := map[string]string{}
	for _, e := range c.Env {
		all[e.Name] = e.Value
	}
	return all
}

var setting = regexp.MustCompile("(?m)^\\| `(POSTHASTE_[A-Z_]+)` \\| `--[a-z-]+` \\| (?:`([^`]*)`|–) \\|")

// settings are all that docs/configuration.md lists, with their defaults.
func settings(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, m := range setting.FindAllStringSubmatch(file(t, "../docs/configuration.md"), -1) {
		all[m[1]] = m[2]
	}
	if len(all) < 30 {
		t.Fatalf("docs/configuration.md lists %d settings", len(all))
	}
	return all
}

func file(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return string(b)
}

// TestManifestsSettings: every setting exists, none is a secret in plain text, and the page says what the Secrets hold.
func TestManifestsSettings(t *testing.T) {
	t.Parallel()
	m, known := render(t, example), settings(t)
	page := file(t, "../docs/deploying.md")
	check := func(name string, c core.Container) {
		given := environment(c)
		for _, from := range c.EnvFrom {
			switch {
			case from.ConfigMapRef != nil:
				config, ok := m.configs[from.ConfigMapRef.Name]
				if !ok {
					t.Errorf("%s refers to %s, which does not exist", name, from.ConfigMapRef.Name)
				}
				for key, value := range config.Data {
					given[key] = value
				}
			case !strings.Contains(page, "create secret generic "+from.SecretRef.Name+" "):
				t.Errorf("docs/deploying.md does not say how to make the Secret %s", from.SecretRef.Name)
			}
		}
		for key := range given {
			if _, ok := known[key]; !ok {
				t.Errorf("%s is given %s, which is no setting", name, key)
			}
			if strings.HasSuffix(key, "_URL") || strings.HasSuffix(key, "_TOKEN") {
				t.Errorf("%s is given %s in plain text", name, key)
			}
		}
		if given["POSTHASTE_WAL_BUDGET"] != "4GiB" || given["POSTHASTE_LOG_FORMAT"] != "json" {
			t.Errorf("%s: base and overlay are not merged: %v", name, given)
		}
	}
	for name, p := range m.pods() {
		for _, c := range containers(p) {
			check(name+" "+c.Name, c)
		}
	}
}

// TestManifestsStop: a pod has time for an orderly stop, and the API keeps serving until the cluster has noticed.
func TestManifestsStop(t *testing.T) {
	t.Parallel()
	drain, err := time.ParseDuration(settings(t)["POSTHASTE_DRAIN_TIMEOUT"])
	must(t, err)
	for name, d := range render(t, example).deployments {
		pod, before := d.Spec.Template.Spec, int64(0)
		if l := container(t, d.Spec.Template).Lifecycle; l != nil {
			before = l.PreStop.Sleep.Seconds
		} else if name == "posthaste-api" {
			t.Errorf("%s stops at once", name)
		}
		grace := time.Duration(*pod.TerminationGracePeriodSeconds-before) * time.Second
		if grace < drain+5*time.Second {
			t.Errorf("%s has %v for a stop that may take %v and a little", name, grace, drain)
		}
	}
}

// TestRulesAreCurrent: the PrometheusRules contain the rule files.
func TestRulesAreCurrent(t *testing.T) {
	t.Parallel()
	want, err := Rules("../grafana/prometheus/rules", "")
	must(t, err)
	for name, text := range want {
		if file(t, "kubernetes/"+name) != string(text) {
			t.Errorf("kubernetes/%s does not contain the rules: run make manifests", name)
		}
	}
	const mine = "https://docs.example.org/runbook.md"
	moved, err := Rules("../grafana/prometheus/rules", mine)
	must(t, err)
	for name, text := range moved {
		if !strings.Contains(string(text), mine+"#") || strings.Contains(string(text), defaultRunbook) {
			t.Errorf("kubernetes/%s does not link to %s", name, mine)
		}
	}
	if _, err := Rules(t.TempDir(), ""); err == nil {
		t.Error("a folder without rules is no error")
	}
}

// must ends the test if err is not nil.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// TestManifestsProcesses gives the program what the pods give it. It takes the settings, and without the Secret's token
// it refuses to start.
func TestManifestsProcesses(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "posthaste")
	output(t, "go", "-C", "..", "build", "-o", program, "./cmd/posthaste")
	m := render(t, example)
	for name, d := range m.deployments {
		c := container(t, d.Spec.Template)
		env := []string{
			"POSTHASTE_POSTGRES_URL=postgres://127.0.0.1:1/x", "POSTHASTE_REDIS_URL=redis://127.0.0.1:1/0",
		}
		for _, config := range m.configs {
			for key, value := range config.Data {
				env = append(env, key+"="+value)
			}
		}
		for key, value := range environment(c) {
			env = append(env, key+"="+value)
		}
		run := func(env []string, args ...string) (int, string) {
			cmd := exec.CommandContext(t.Context(), program, args...)
			cmd.Env = env
			out, _ := cmd.CombinedOutput()
			return cmd.ProcessState.ExitCode(), string(out)
		}
		if code, out := run(env, c.Args...); code != 2 || !strings.Contains(out, "set --admin-token") {
			t.Errorf("%s without a token: exit %d, want 2: %s", name, code, out)
		}
		code, out := run(append(env, "POSTHASTE_ADMIN_TOKEN=token"), "settings")
		if code != 0 || strings.Contains(out, "not a setting") {
			t.Errorf("%s: settings: exit %d: %s", name, code, out)
		}
	}
}

// TestMain goes to the folder deploy, which all names are relative to.
func TestMain(m *testing.M) {
	if err := os.Chdir("../../deploy"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
