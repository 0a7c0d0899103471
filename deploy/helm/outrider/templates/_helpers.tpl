{{/* As Helm's starter chart has them. */}}
{{- define "outrider.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "outrider.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "outrider.serviceAccountName" -}}
{{- default (ternary (include "outrider.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{/* What selects the pods of a component: (list ROOT [COMPONENT [POOL]]), where the pool may be "". */}}
{{- define "outrider.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "outrider.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
{{- with rest . }}
app.kubernetes.io/component: {{ first . }}
{{- with rest . | compact }}
outrider/pool: {{ first . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Labels of every object, of the same list. */}}
{{- define "outrider.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "outrider.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: outrider
{{- end }}

{{/* The values of a part as JSON: those of every pod, and what the part has over them, (list ROOT OVER...). */}}
{{- define "outrider.part" -}}
{{- $part := pick (first .).Values "image" "imagePullSecrets" "podAnnotations" "podLabels" "podSecurityContext" "securityContext" "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "extraEnv" "volumes" "volumeMounts" "gpuResource" "workersPerGpu" "cache" | deepCopy }}
{{- range rest . }}
{{- $part = mergeOverwrite $part (deepCopy (. | default dict)) }}
{{- end }}
{{- toJson $part }}
{{- end }}

{{/* A pod's metadata. These are of (dict "root" ROOT "part" PART "labels" LIST), the list as above, unless they say else. */}}
{{- define "outrider.podMetadata" -}}
labels:
  {{- merge (include "outrider.selectorLabels" .labels | fromYaml) .part.podLabels | toYaml | nindent 2 }}
{{- with .part.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What every pod has beside its containers and volumes. */}}
{{- define "outrider.pod" -}}
{{- $labels := .labels -}}
serviceAccountName: {{ include "outrider.serviceAccountName" .root }}
automountServiceAccountToken: {{ .root.Values.serviceAccount.automount }}
# Else a Service called outrider-gateway would set OUTRIDER_GATEWAY_PORT, a setting of ours.
enableServiceLinks: false
{{- range $key := list "imagePullSecrets" "priorityClassName" "runtimeClassName" "nodeSelector" "affinity" }}
{{- with get $.part $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .part.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .part.tolerations .part.gpus }}
tolerations:
  {{- if .part.gpus }}
  - {key: {{ .part.gpuResource }}, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- with .part.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
topologySpreadConstraints:
  {{- $spread := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" }}
  {{- range .part.topologySpreadConstraints | default (list $spread) }}
  - {{- merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" (include "outrider.selectorLabels" $labels | fromYaml))) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}

{{/* What every container has beside what it runs, its probes and resources. */}}
{{- define "outrider.container" -}}
image: "{{ .part.image.repository }}:{{ .part.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .part.image.pullPolicy }}
{{- with .part.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Probes, with the part's over them: (dict "part" PART "probes" PROBES). */}}
{{- define "outrider.probes" -}}
{{- range $name := list "startupProbe" "livenessProbe" "readinessProbe" }}
{{- with mergeOverwrite (get $.probes $name | default dict) (get $.part $name | default dict) }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* A setting as the text of an environment variable: 1048576, not 1.048576e+06. */}}
{{- define "outrider.text" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ . | toJson | quote }}{{ end }}
{{- end }}

{{/* Resources of a worker. The cache takes room of the node, unless it is a claim. */}}
{{- define "outrider.resources" -}}
{{- $limits := dict "cpu" (toString .part.cpu) "memory" .part.memory }}
{{- if .part.gpus }}{{ $_ := set $limits .part.gpuResource .part.gpus }}{{ end }}
{{- $requests := deepCopy $limits }}
{{- if not .part.cache.existingClaim }}{{ $_ := set $requests "ephemeral-storage" .part.cache.size }}{{ end }}
{{- mergeOverwrite (dict "requests" $requests "limits" $limits) (.part.resources | default dict) | toYaml }}
{{- end }}

{{/* gpu_memory_utilization of a worker: one GPU's 0.9 in equal parts, to 3 places; empty where it has its own. */}}
{{- define "outrider.gpuMemory" -}}
{{- if and .gpus (gt (int .workersPerGpu) 1) }}{{ divf (floor (divf 900 .workersPerGpu)) 1000 }}{{ end }}
{{- end }}

{{/* Whole cores of a quantity of CPU: 500m and 0.5 are 1. */}}
{{- define "outrider.cores" -}}
{{- $text := toString . }}
{{- if hasSuffix "m" $text }}{{ divf (trimSuffix "m" $text) 1000 | ceil }}{{ else }}{{ ceil $text }}{{ end }}
{{- end }}

{{/* Volumes of a worker, whose component is second in .labels, and where they are. */}}
{{- define "outrider.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 1Gi}}
{{- if .part.cache.existingClaim }}
- {name: cache, persistentVolumeClaim: {claimName: {{ .part.cache.existingClaim }}}}
{{- else }}
- {name: cache, emptyDir: {sizeLimit: {{ .part.cache.size }}}}
{{- end }}
{{- with .root.Values.modelsClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- with .root.Values.secrets }}
{{- if or .tls .hubToken }}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- with .tls }}
      - secret: {name: {{ . }}-{{ index $.labels 1 }}}
      {{- end }}
      {{- with .hubToken }}
      - secret: {name: {{ . }}}
      {{- end }}
{{- end }}
{{- end }}
{{- with .part.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "outrider.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/outrider}
{{- if .root.Values.modelsClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if or .root.Values.secrets.tls .root.Values.secrets.hubToken }}
- {name: secrets, mountPath: /etc/outrider/secrets, readOnly: true}
{{- end }}
{{- with .part.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Target pools by the name of the gateways that serve them; "" for those of all pools. */}}
{{- define "outrider.gateways" -}}
{{- $found := dict }}
{{- $name := printf "%s-gateway" (include "outrider.fullname" .) }}
{{- if .Values.kuberay }}
{{- $_ := set $found $name "" }}
{{- else }}
{{- range .Values.targets }}
{{- $_ := set $found (printf "%s-%s" $name .name) .name }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* The values of the gateways of a target pool, or of all: (list ROOT POOL). */}}
{{- define "outrider.gatewayPart" -}}
{{- $own := dict }}
{{- range (first .).Values.targets }}
{{- if eq .name (last $) }}{{ $own = .gateway }}{{ end }}
{{- end }}
{{- include "outrider.part" (list (first .) (first .).Values.gateway $own) }}
{{- end }}

{{/* Longer than a worker drains for, by what it takes to end. */}}
{{- define "outrider.grace" -}}
{{- add 60 (ceil (dig "drain_timeout_s" 5 (.settings | default dict))) }}
{{- end }}

{{/* How a probe asks a part for its gRPC health: (list ROOT PORT). Kubernetes asks by itself, but speaks no TLS. */}}
{{- define "outrider.health" -}}
{{- if (index . 0).Values.secrets.tls -}}
exec: {command: [python, deploy/docker/container_health.py, grpc, "hostname:{{ index . 1 }}"]}
{{- else -}}
grpc: {port: {{ index . 1 }}}
{{- end }}
{{- end }}

{{/* Probes of a worker that is a Deployment's: (list ROOT ROLE PORT). A model is fetched and loaded first. */}}
{{- define "outrider.workerProbes" -}}
startupProbe:
  {{- include "outrider.health" (list (first .) (last .)) | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ div (first .).Values.loadTimeoutSeconds 10 }}
livenessProbe:
  exec: {command: [python, deploy/docker/container_health.py, {{ index . 1 }}, "hostname:{{ last . }}"]}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  {{- include "outrider.health" (list (first .) (last .)) | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
{{- end }}

{{/* Probes of a node of Ray: (list ROOT PORT). Ready = a worker serves there; alive = it is one of the cluster. */}}
{{- define "outrider.nodeProbes" -}}
livenessProbe:
  tcpSocket: {port: raylet}
  initialDelaySeconds: 60
  periodSeconds: 5
  failureThreshold: 6
readinessProbe:
  {{- include "outrider.health" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
{{- end }}

{{/* Probes of a gateway. Its event loop is asked whether it lives, whatever its targets do: to end it brings none. */}}
{{- define "outrider.gatewayProbes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 30
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* Seconds that a Deployment may make no progress: Kubernetes' own 600, and what workers load. */}}
{{- define "outrider.progress" -}}
{{- add 600 .Values.loadTimeoutSeconds }}
{{- end }}

{{/* Ray's environment, as deploy/docker/node.sh has it. */}}
{{- define "outrider.ray" -}}
# Else Ray takes half a minute to see that a node is gone.
- {name: RAY_health_check_initial_delay_ms, value: "2000"}
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "2000"}
- {name: RAY_health_check_failure_threshold, value: "3"}
# Ray's 15 is for batch jobs: whoever else runs on the machine would come before answers.
- {name: RAY_worker_niceness, value: "0"}
# Ray's logs are in /tmp, and a pod whose /tmp is full is evicted: of each, two files of 8 MiB, not six of 512.
- {name: RAY_ROTATION_MAX_BYTES, value: "8388608"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "1"}
{{- end }}

{{/* What contradicts itself. */}}
{{- define "outrider.check" -}}
{{- $targets := list }}
{{- range .Values.targets }}{{ $targets = append $targets .name }}{{ end }}
{{- $names := $targets }}
{{- range $draft := .Values.drafts }}
{{- $names = append $names .name }}
{{- range .serves }}
{{- if not (has . $targets) }}
{{- fail (printf "drafts: %s serves %s, which is no target pool; there are %s. Without drafts of yours the chart's own are there: give yours, or `drafts: []`" $draft.name . (join ", " $targets)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne (len $names) (len (uniq $names)) }}{{ fail (printf "two pools have one name: %s" (join ", " $names)) }}{{ end }}
{{- range concat .Values.targets (.Values.drafts | default list) }}
{{- if regexMatch "^(gateway(-.*)?|.*-metrics|head|launcher)$" .name }}
{{- fail (printf "pool %s has a name that gateways, their metrics, or Ray's head and launcher have; give it another" .name) }}
{{- end }}
{{- include "outrider.fits" (printf "%s-%s" (include "outrider.fullname" $) .name) }}
{{- $ranks := int (dig "tensor_parallel" 1 (.settings | default dict)) }}
{{- if and .gpus (ne (int .gpus) $ranks) }}
{{- fail (printf "pool %s has gpus %v, and a worker of it takes %d, one for each rank of tensor_parallel; say the same in both" .name .gpus $ranks) }}
{{- end }}
{{- if and .gpus (gt $ranks 1) (gt (int (.workersPerGpu | default $.Values.workersPerGpu)) 1) }}
{{- fail (printf "pool %s has workersPerGpu and tensor_parallel %d: a rank takes a GPU of its own; say workersPerGpu 1 for it" .name $ranks) }}
{{- end }}
{{- if lt (int (.maxReplicas | default .replicas)) (int .replicas) }}
{{- fail (printf "pool %s has replicas %v, and maxReplicas %v" .name .replicas .maxReplicas) }}
{{- end }}
{{- if and $.Values.kuberay .gateway }}
{{- fail (printf "pool %s has values of its gateways, and with kuberay the same serve all pools; say them in gateway" .name) }}
{{- end }}
{{- if and $.Values.kuberay .strategy }}
{{- fail (printf "pool %s has a strategy, which is a Deployment's, and kuberay is on: leave one out" .name) }}
{{- end }}
{{- if and .answersPerReplica $.Values.kuberay }}
{{- fail (printf "pool %s has answersPerReplica, which is for KEDA, and kuberay is on: its launcher scales; leave one out" .name) }}
{{- end }}
{{- if and (not $.Values.kuberay) (ne (not .maxReplicas) (not .answersPerReplica)) }}
{{- fail (printf "pool %s has one of maxReplicas and answersPerReplica: give both, or neither" .name) }}
{{- end }}
{{- if and .maxReplicas (not $.Values.kuberay) (not $.Values.prometheus.monitors) }}
{{- fail (printf "pool %s has maxReplicas, and prometheus.monitors is false, whose labels KEDA's query asks for; set it" .name) }}
{{- end }}
{{- /* No worker has more answers than slots, nor a target more than its gateways give each; and an autoscaler leaves
alone what is a tenth too much. */}}
{{- $most := int (dig "max_slots" 64 (.settings | default dict)) }}
{{- $limit := "max_slots" }}
{{- $gateway := include "outrider.gatewayPart" (list $ .name) | fromJson }}
{{- $gateways := ternary $gateway.autoscaling.minReplicas $gateway.replicas $gateway.autoscaling.enabled }}
{{- $given := mul $gateways (dig "max_running" 64 $gateway.settings) }}
{{- if and (not .serves) (lt $given (int64 $most)) }}
{{- $most = $given }}
{{- $limit = "the gateways' max_running" }}
{{- end }}
{{- if and .answersPerReplica (ge (mulf .answersPerReplica 1.1) (float64 $most)) }}
{{- fail (printf "pool %s has answersPerReplica %v, and a worker of it has no more than %d answers, by %s: the pool would never grow; say at most %d, or raise %s" .name .answersPerReplica $most $limit (div (sub (mul 10 $most) 1) 11) $limit) }}
{{- end }}
{{- end }}
{{- if and (or .Values.prometheus.rules .Values.grafana.dashboards) (not (.Files.Glob "files/*/*")) }}
{{- fail "this copy of the chart has no files/: those are links of the repository, which Flux's GitRepository leaves out; take the chart of a release, outrider-VERSION.tgz" }}
{{- end }}
{{- if and .Values.kuberay (ne (int .Values.loadTimeoutSeconds) 900) }}
{{- fail (printf "loadTimeoutSeconds is %v, and with kuberay workers have the 900 s of its launcher; leave it out" .Values.loadTimeoutSeconds) }}
{{- end }}
{{- if and .Values.endpointPicker .Values.kuberay (gt (len $targets) 1) }}
{{- fail (printf "endpointPicker is %s, and with kuberay the same gateways serve %s: an InferencePool is of one model; leave it out, or make a release for each" .Values.endpointPicker (join " and " $targets)) }}
{{- end }}
{{- $routes := dict }}
{{- range $name, $pool := include "outrider.gateways" . | fromJson }}
{{- include "outrider.fits" (printf "%s-metrics" $name) }}
{{- $gateway := include "outrider.gatewayPart" (list $ $pool) | fromJson }}
{{- range $kind := list "ingress" "httpRoute" }}
{{- $given := get $gateway $kind }}
{{- $route := printf "%s of %s" $kind (pick $given "hosts" "hostnames" "rules" | toJson) }}
{{- if and $given.enabled (not (get $given (ternary "hosts" "parentRefs" (eq $kind "ingress")))) }}
{{- fail (printf "%s is enabled for %s, and names no %s" $kind $name (ternary "hosts" "parentRefs" (eq $kind "ingress"))) }}
{{- end }}
{{- if and $given.enabled (hasKey $routes $route) }}
{{- fail (printf "%s and %s have the same %s; give each target pool its own, in its gateway.%s" (get $routes $route) $name $route $kind) }}
{{- end }}
{{- if $given.enabled }}{{ $_ := set $routes $route $name }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A Service's name is a label of DNS. */}}
{{- define "outrider.fits" -}}
{{- if gt (len .) 63 }}{{ fail (printf "%s is longer than the 63 characters of a Service's name: shorten the release's or the pool's" .) }}{{ end }}
{{- end }}

{{/* The pools as the launcher reads them, docs/cluster.md, as JSON. */}}
{{- define "outrider.cluster" -}}
{{- $cluster := dict "ray" (dict "address" "auto" "name" (include "outrider.fullname" .)) }}
{{- if .Values.secrets.tls }}{{ $_ := set $cluster.ray "tls_dir" "/etc/outrider/secrets" }}{{ end }}
{{- range $role, $pools := dict "target" .Values.targets "draft" .Values.drafts }}
{{- $of_role := dict }}
{{- range $pools }}
{{- $pool := dict }}
{{- with include "outrider.gpuMemory" (include "outrider.part" (list $ .) | fromJson) }}{{ $_ := set $pool "gpu_memory_utilization" (float64 .) }}{{ end }}
{{- range $key, $value := .settings }}{{ $_ := set $pool $key $value }}{{ end }}
{{- $port := ternary 7200 7100 (eq $role "target") }}
{{- range $key, $value := dict "count" .replicas "labels" (dict "outrider/pool" .name) "num_cpus" (include "outrider.cores" .cpu | float64) "port" $port "metrics_port" (add $port 2000) }}
{{- $_ := set $pool $key $value }}
{{- end }}
{{- with .model }}{{ $_ := set $pool "model" . }}{{ end }}
{{- with .maxReplicas }}{{ $_ := set $pool "max" . }}{{ end }}
{{- with .gpus }}{{ $_ := set $pool "num_gpus" . }}{{ end }}
{{- with .servedName }}{{ $_ := set $pool "model_name" . }}{{ end }}
{{- with .serves }}{{ $_ := set $pool "serves" . }}{{ end }}
{{- if $.Values.secrets.tls }}{{ $_ := set $pool "tls_dir" "/etc/outrider/secrets" }}{{ end }}
{{- $_ := set $of_role .name $pool }}
{{- end }}
{{- $_ := set $cluster (printf "%ss" $role) $of_role }}
{{- end }}
{{- toPrettyJson $cluster }}
{{- end }}
